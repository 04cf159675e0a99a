"""Views of a run for people, computed from its log: sentences, costs, progress, scores, reasons."""
