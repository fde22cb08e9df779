"""Modules that run in the server's environment; packer never imports them."""
