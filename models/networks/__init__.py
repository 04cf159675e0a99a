"""Networks: tables, construction, weights, cost and export."""
