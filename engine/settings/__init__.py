"""Settings that settle themselves: each that is not given is chosen from model, card, ranks and role, with a reason."""
