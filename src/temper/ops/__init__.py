"""Operations on streams. `naive` is the reference that faster implementations are compared to."""
