"""How much of prompts a step takes beside answers, and what steps were measured to take."""
