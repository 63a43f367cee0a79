"""Pure maths on tensors: no modules, no files."""
