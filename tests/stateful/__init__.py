"""States of torchdata's StatefulDataLoader, made by itself and loaded by ours."""
