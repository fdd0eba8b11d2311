"""`elasticgang doctor`: whether this host can run a job. `facts.py` gathers, `verdicts.py` judges."""
