-- Whether a turn changed nothing that a ledger keeps but the streams it lists, and the producers whose
-- batches it wrote to the log: then a node that reads this need not forget everything. Servers of the
-- version before do not say so, and what is not said is not so.
ALTER TABLE turns ADD COLUMN listed boolean NOT NULL DEFAULT false;
