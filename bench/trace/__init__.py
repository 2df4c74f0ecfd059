"""One request of a disaggregated mesh as an OpenTelemetry collector sees it."""
