"""What crosses between the two halves of a rank: values and protocols, no state, no I/O, no tensors."""
