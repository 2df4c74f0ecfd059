"""The trace of one request of a disaggregated mesh, as an OpenTelemetry collector gets it."""
