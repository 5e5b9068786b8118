package rules

var snapshotRules []Rule
