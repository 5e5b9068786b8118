package doctor

import (
	"errors"
	"flag"
)

// Options are the options of a doctor.
type Options struct {
	Question    Question
	Objects     string   // a file with objects of Kubernetes, instead of kubectl
	NodeReports []string // files with reports of nodes, instead of kubectl exec
	Namespace   string   // of the driver; empty means the chart's
	Kubectl     bool
	JSON        bool
	Colour      bool   // the report goes to a terminal
	Bundle      string // a file to write; empty for none
	HTML        string // a file to write; empty for none
}

// Flags defines the flags that set the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.BoolVar(&o.Kubectl, "kubectl", true, "ask kubectl's current cluster; --kubectl=false asks "+
		"no cluster and no node")
	flags.StringVar(&o.Namespace, "driver-namespace", driverNamespace, "`NAMESPACE` of the driver: "+
		"only pods of its DaemonSet there are asked")
	flags.StringVar(&o.Objects, "objects", "", "`FILE` with the output of kubectl get -o json, "+
		"instead of kubectl; - is the standard input")
	flags.Func("node-report", "`FILE` with the output of oxide-csi-plugin inspect, instead of asking "+
		"the driver's pod on the node; may be repeated", func(value string) error {
		o.NodeReports = append(o.NodeReports, value)
		return nil
	})
	flags.StringVar(&o.Bundle, "bundle", "", "`FILE` to write with the diagnosis and what it was "+
		"made from, without secrets, as JSON")
	flags.StringVar(&o.HTML, "html", "", "`FILE` to write with the diagnosis as a page")
	flags.Func("output", "`FORMAT` of the report: text (the default) or json",
		func(value string) error {
			o.JSON = value == "json"
			if value != "json" && value != "text" {
				return errors.New("has to be text or json")
			}
			return nil
		})
}
