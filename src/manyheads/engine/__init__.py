"""How local training runs: the phase language and the engines behind it."""
