"""The command line: the only place, beside the engine process, that wires everything together."""
