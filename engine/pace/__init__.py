"""How many prompt tokens a step computes while requests decode, and what steps were measured to take."""
