"""Files: folders that appear whole or not at all, gates, manifests, model cards."""
