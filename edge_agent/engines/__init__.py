"""Engines: what runs a client half's arithmetic. One file per engine, `<name>_engine.py`; heavy imports stay here."""
