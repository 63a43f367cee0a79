"""The code that runs a cut model, here and in the folder of every result that needs it."""

RUNTIME = "modeling_headprune.py"  # this package's module, as it is called in a result's folder
MANIFEST = "headprune.json"  # the record that lies beside it
