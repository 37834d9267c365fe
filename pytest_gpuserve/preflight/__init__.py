"""What the installed SGLang's own argument logic says about cells, for a GPU that need not be here."""
