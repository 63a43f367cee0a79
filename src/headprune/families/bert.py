"""BERT: separate q, k and v in ``attention.self``, the output projection in its sibling."""

from headprune.families.spec import Family, Projection

BERT = Family(
    model_type="bert",
    attention="encoder.layer.*.attention.self",
    projections=(
        Projection("query", "q"),
        Projection("key", "k"),
        Projection("value", "v"),
        Projection("../output.dense", "o"),
    ),
    head_dim="attention_head_size",
    follows={"num_attention_heads": "query_heads", "all_head_size": "query_width"},
    refused={"add_cross_attention": "cross attention of BERT decoders is not in the table yet"},
)
