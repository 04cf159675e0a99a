"""Arrays: tensors, their files, and exact sums."""
