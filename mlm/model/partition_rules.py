"""How the models' parameters are split over a mesh of data x fsdp x tensor: the rules of `Model.partition_rules`."""

from jax.sharding import PartitionSpec as P

# (pattern of a parameter's whole name, how its axes are split over the mesh); the first pattern that matches applies
PartitionRules = tuple[tuple[str, P], ...]

BERT: PartitionRules = (  # and RoBERTa, without a head
    (r"\w+/embeddings/word_embeddings/embedding", P(("tensor", "fsdp"), None)),
    (r"\w+/embeddings/(position|token_type)_embeddings/embedding", P()),
    (r".*/attention/self/(query|key|value)/kernel", P("fsdp", "tensor")),
    (r".*/attention/self/(query|key|value)/bias", P("tensor")),
    (r".*/attention/output/dense/kernel", P("tensor", "fsdp")),
    (r".*/intermediate/dense/kernel", P("fsdp", "tensor")),
    (r".*/intermediate/dense/bias", P("tensor")),
    (r".*/layer/\d+/output/dense/kernel", P("tensor", "fsdp")),
    (r".*/output/dense/bias", P()),
    (r".*/LayerNorm/(scale|bias)", P()),
)
BERT_LM_HEAD: PartitionRules = (
    (r"cls/predictions/transform/dense/kernel", P("fsdp", None)),
    (r"cls/predictions/transform/dense/bias", P()),
    (r"cls/predictions/bias", P("tensor")),
)
BERT_POOLER: PartitionRules = ((r"bert/pooler/.*", P()),)
ROBERTA_LM_HEAD: PartitionRules = (
    (r"lm_head/dense/kernel", P("fsdp", None)),
    (r"lm_head/bias", P("tensor")),
    (r"lm_head/.*", P()),
)
MODERNBERT: PartitionRules = (
    (r"model/embeddings/tok_embeddings/embedding", P(("tensor", "fsdp"), None)),
    (r".*/attn/Wqkv/kernel", P("fsdp", None, "tensor")),
    (r".*/mlp/Wi/kernel", P("fsdp", None, "tensor")),
    (r".*/(attn|mlp)/Wo/kernel", P("tensor", "fsdp")),
    (r".*norm/scale", P()),
)
MODERNBERT_LM_HEAD: PartitionRules = (
    (r"head/dense/kernel", P("fsdp", None)),
    (r"decoder/bias", P("tensor")),
)
# Small, and replicated: with a split classifier, XLA's partitioner crashes on the gradient on a mesh of three axes
# (jax 0.10.2, CPU).
CLASSIFIER: PartitionRules = ((r"classifier/.*", P()),)
MODERNBERT_CLASSIFIER: PartitionRules = ((r"(head|classifier)/.*", P()),)
