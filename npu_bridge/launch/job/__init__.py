"""A job: where its ranks run, starting them, watching them, and telling which one failed first."""
