"""Planning: from scores and budgets to the heads that stay."""
