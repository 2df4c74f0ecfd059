"""How many tokens' copies for the experts exist at once. Without torch, for plans of memory."""

# At DeepSeek's widths, nine copies a token take about 2.3 GB of workspace.
CHUNK_TOKENS = 8192
# If ranks divide the experts, there are twice as many tokens, of all ranks together: each of R1's 256 experts then has
# some 512 rows instead of 256, fewer of them are padding, and four H200 compute prompts 8% faster. The workspace
# doubles too, since all copies may be one rank's.
DIVIDED_CHUNKS = 2
