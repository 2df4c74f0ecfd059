"""Version 1 of the contracts: generated from the .proto files in this folder."""
