"""Programs that look at this repository itself; `just` names each. Nothing here is shipped."""
