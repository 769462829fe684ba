"""A set of samples against a reference: reading both, the metrics, the report."""
