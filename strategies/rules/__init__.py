"""One small rule for each operator, by named axes."""
