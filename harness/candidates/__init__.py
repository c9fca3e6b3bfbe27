"""The candidates that ship. Each module imports without its library: what it needs is imported on a rank."""
