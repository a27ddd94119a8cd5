"""Operations on tensors that have more than one implementation, and the one list of those."""
