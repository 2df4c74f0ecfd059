"""Where a request goes: pure functions of what workers reported and what was placed on them since."""
