"""FedStitch (arXiv 2409.07202): networks stitched from blocks of pre-trained donors."""
