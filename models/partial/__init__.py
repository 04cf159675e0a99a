"""Parts of networks: by width and depth, under masks, behind gates, or as adapters."""
