"""GLUE (Wang et al., 2019): its tasks, published protocols of fine-tuning, and the table of a model."""
