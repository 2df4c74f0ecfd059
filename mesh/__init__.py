"""What every service is built from; imports no tensor library and no service."""
