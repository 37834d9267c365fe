"""Files that users write (matrices, known-bad lists, scenarios) and the cells that follow from them."""
