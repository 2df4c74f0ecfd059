"""DeepSeek-R1's shapes, as published. Benchmarks of kernels use them, and so do the kernels' tests."""

from kernels.moe_gate import Routing

LAYERS, HIDDEN, VOCABULARY = 61, 7168, 129280

# Attention: heads, and widths of a head, of the compressed query and of the cached latent with its key.
HEADS, NOPE, ROPE, VALUE = 128, 128, 64, 128
QUERY, LATENT = 1536, 512
WIDTH = LATENT + ROPE

# Experts: all, those that a token chooses, those that see every token, and the width of each.
EXPERTS, CHOICES, SHARED, EXPERT_WIDTH = 256, 8, 1, 2048
ROUTING = Routing(CHOICES, groups=8, groups_per_token=4, normalize=True, scaling=2.5, shared=SHARED)

# Outputs and inputs of the FP8 linear layers.
LINEAR_LAYERS = {
    "q_a, kv_a": (QUERY + WIDTH, HIDDEN),
    "q_b": (HEADS * (NOPE + ROPE), QUERY),
    "o": (HIDDEN, HEADS * VALUE),
    "dense gate, up": (2 * 18432, HIDDEN),
    "dense down": (HIDDEN, 18432),
}
EXPERT_LAYERS = {"gate, up": (2 * EXPERT_WIDTH, HIDDEN), "down": (HIDDEN, EXPERT_WIDTH)}
