"""`classify`: a trained model fine-tuned to predict labels; its scores, its confusion, its predictions."""
