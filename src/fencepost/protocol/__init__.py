"""The rules, pure: no I/O, no await, no clock. What happened is a return value.

Everything a server or a store must decide is decided here by functions of plain values, so that
each rule is one call in a test and every store decides alike.
"""
