package rules

var guestRules []Rule
