"""Check of a GPU through the agent's own code, within 10 minutes (`fedquilt board check-gpu`)."""
