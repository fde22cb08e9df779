"""An example of what others can add to packer: one objective, one predictor, one solver."""
