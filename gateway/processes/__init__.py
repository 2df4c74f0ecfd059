"""Several processes of one gateway that share its port."""
