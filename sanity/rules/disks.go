package rules

var diskRules []Rule
