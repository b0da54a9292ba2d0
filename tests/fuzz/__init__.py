"""Random models and configurations, checked against eager PyTorch."""
