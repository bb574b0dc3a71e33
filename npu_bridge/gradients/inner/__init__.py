"""Gives optimizers of all families one interface, through which pipelines call them; also shards their updates."""
