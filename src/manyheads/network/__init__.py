"""How workers exchange anything: in one process, or over many."""
