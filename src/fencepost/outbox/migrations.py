"""The outbox table as a migration of Alembic or of Django, for the user's own repository."""

from __future__ import annotations

from fencepost.outbox.rows import DialectName, drop_statements, schema_statements

_ALEMBIC = '''"""The outbox of Fencepost.

Set `down_revision` to your newest revision.
"""

from alembic import op

revision = "fencepost_outbox_1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
{upgrade}


def downgrade() -> None:
    # Sends that were not delivered are lost.
{downgrade}
'''

_DJANGO = '''"""The outbox of Fencepost.

Add your newest migration to `dependencies`. The table has no model: only the outbox writes to it.
"""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = []

    operations = [
{operations}
    ]
'''


def alembic_migration(name: DialectName) -> str:
    """A revision for `migrations/versions`."""
    return _ALEMBIC.format(
        upgrade="\n".join(
            f"    op.execute({_quoted(text, 8)})" for text in schema_statements(name)
        ),
        downgrade="\n".join(f"    op.execute({_quoted(text, 8)})" for text in drop_statements()),
    )


def django_migration(name: DialectName) -> str:
    """A migration for the `migrations` folder of an app."""
    lines = []
    for text in schema_statements(name):
        # Indexes go with their table, and so does the version.
        undone = (drop for drop in drop_statements() if text.startswith(f"create{drop[4:]} "))
        undo = next((f'"{drop}"' for drop in undone), "migrations.RunSQL.noop")
        lines.append(f"        migrations.RunSQL({_quoted(text, 12)}, {undo}),")
    return _DJANGO.format(operations="\n".join(lines))


def _quoted(text: str, indent: int) -> str:
    if "\n" not in text:
        return f'"{text}"' if '"' not in text else f"'{text}'"
    inner = text.replace("\n", "\n" + " " * (indent - 4))
    return f'"""{inner}"""'
