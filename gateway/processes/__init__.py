"""Several processes of one gateway, behind one port."""
