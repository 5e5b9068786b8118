package rules

var instanceRules []Rule
