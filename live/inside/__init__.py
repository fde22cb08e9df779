"""What runs in the server's environment, not in packer's: packer never imports these modules."""
