"""Whether a KV pool of a given size fits."""

from mesh.errors import ConfigError


def check_room(total_blocks: int, block_bytes: int, there_bytes: int) -> None:
    """Raises ConfigError if a pool of so many blocks takes more than there is."""
    if total_blocks * block_bytes > there_bytes:
        asked, there = (f"{size / 1e9:,.1f} GB" for size in (total_blocks * block_bytes, there_bytes))
        raise ConfigError(
            f"engine.total_blocks={total_blocks} takes {asked} and {there} are free: lower it to"
            f" {there_bytes // block_bytes}, or leave it out"
        )
